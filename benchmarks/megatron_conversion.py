"""A Hugging Face folder onto Megatron ranks and a folder again: whether it is the same bit for bit, and its peak memory.

    python megatron_conversion.py --model ../models/smollm2-135m-instruct

Each rank's anonymous memory is sampled while it reads its part and while rank 0 writes files of `--file-mb`. Reading is given as a
multiple of the rank's part of the weights, writing as a multiple of one file; what the process had before is taken off.
"""

import argparse
import json
import multiprocessing as mp
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pellucid.console import console

LAYOUTS = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}, "tensor 2 × pipeline 2": {"tensor": 2, "pipeline": 2}}


def anonymous_bytes() -> int:
    """Return the memory that belongs to the process alone, mapped files left out."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def peak_while(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `work` gives, and how much memory it took at most beyond what there was, sampled each 2 ms."""
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        value = work()
    finally:
        done.set()
        thread.join()
    return value, max(most, anonymous_bytes()) - before


def convert(rank: int, num_ranks: int, store: str, options: argparse.Namespace, sizes: dict[str, int], out: str, answers: Any) -> None:
    """Read the folder into this rank's chunks and write it again."""
    from pellucid.training.common.mini_batch import MicroBatching
    from pellucid.training.common.models import load_tokenizer, read_config
    from pellucid.training.megatron.conversion import Shapes, hf_tensors, write_model_folder
    from pellucid.training.megatron.layout import MegatronLayout, ParallelSizes
    from pellucid.training.megatron.megatron_engine import load_engine
    from pellucid.training.sharding import join_ranks

    torch.set_num_threads(1)
    join_ranks(rank, num_ranks, init_method=store, device=torch.device("cpu"))
    layout = MegatronLayout(ParallelSizes(**sizes), torch.device("cpu"))
    model = read_config(options.model, None, trust_remote_code=False, field="model")

    def load() -> Any:
        cut = MicroBatching(1024, None)
        return load_engine(Path(options.model), model, None, cut, layout, torch.float32, field="model")

    engine, reading = peak_while(load)
    part = sum(parameter.nbytes for chunk in engine.modules for parameter in chunk.parameters())
    chunks, shapes = list(engine.modules), Shapes.of(model)

    def write() -> None:
        tensors = hf_tensors(chunks, shapes, scalar=False)
        if rank == 0:
            write_model_folder(model, load_tokenizer(options.model), Path(out), tensors, file_bytes=options.file_mb * 2**20)
        else:
            for _ in tensors:
                pass

    _, writing = peak_while(write)
    answers.put((rank, part, reading, writing))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--file-mb", type=int, default=128, help="size of the files written")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    context, rows = mp.get_context("spawn"), []
    before = {name: tensor for file in sorted(Path(options.model).glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for name, sizes in LAYOUTS.items():
        num_ranks = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
        with tempfile.TemporaryDirectory() as folder:
            answers, out = context.Queue(), f"{folder}/out"
            arguments = (num_ranks, f"file://{folder}/store", options, sizes, out, answers)
            processes = [context.Process(target=convert, args=(rank, *arguments)) for rank in range(num_ranks)]
            for process in processes:
                process.start()
            found = sorted(answers.get(timeout=600) for _ in processes)
            for process in processes:
                process.join()
            after = {key: tensor for file in Path(out).glob("*.safetensors") for key, tensor in load_file(file).items()}
            num_files = len(list(Path(out).glob("*.safetensors")))
        same = before.keys() == after.keys() and all(torch.equal(before[key].float(), after[key]) for key in before)
        reading = max(peak / part for _, part, peak, _ in found)
        writing = found[0][3] / (options.file_mb * 2**20)
        rows.append({"layout": name, "same": same, "files": num_files, "reading": reading, "writing": writing})
        verdict = "bitwise the same" if same else "DIFFERENT"
        console.print(f"{name:24} {verdict}  {num_files} files  reading {reading:.2f} × a rank's part  writing {writing:.2f} × a file")
    if options.json:
        with options.json.open("a") as stream:
            stream.write(json.dumps({"benchmark": "megatron_conversion", "model": options.model, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
