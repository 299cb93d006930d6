"""`pellucid eval --harness` against the real lm-evaluation-harness, where it is installed."""

import json

import pytest

pytest.importorskip("lm_eval")

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices.index(answer)}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def tasks(work):
    (work.folder / "tasks").mkdir()
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "choices": [str(2 * n), str(2 * n + 31)]} for n in range(10, 30)]
    data = work.write("sums.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    work.write("tasks/sums.yaml", TASK.format(path=data))
    return "tasks"


def test_its_tasks_and_ours_come_in_one_table(work, tasks):
    asked = ["--harness", "sums", "--harness-folder", tasks, "--files", "task:arithmetic?level=2", "--num", "16"]
    done = work.run("eval", "builtin", *asked)
    lines = {line.split()[1]: line.split() for line in done.output.splitlines() if line.startswith("│")}
    assert lines["arithmetic"][-2] == "16" and lines["sums"][-2] == "16"
    assert float(lines["sums"][4].strip("%")) > 80, "the built-in model tells a sum from one that is 31 too large"


def test_a_task_that_it_does_not_have(work, tasks):
    done = work.run("eval", "builtin", "--harness", "sumz", "--harness-folder", tasks, status=2)
    assert "no task 'sumz'" in done.text and "Did you mean" in done.text
