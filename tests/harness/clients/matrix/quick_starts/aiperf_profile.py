"""AIPerf: a few requests over chat completions and Responses, with a tokenizer of bytes instead of a download."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

URL, MODEL = sys.argv[1:]
REQUESTS = 3
REVISION = "0" * 40


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, as model `local/bytes` in a cache of downloads."""
    model = folder / "hub" / "models--local--bytes"
    files = model / "snapshots" / REVISION
    files.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(files / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<s>"}
    (files / "tokenizer_config.json").write_text(json.dumps(special))
    (files / "config.json").write_text('{"model_type": "llama"}')


with TemporaryDirectory() as folder:
    write_tokenizer(Path(folder))
    environment = {**os.environ, "HF_HOME": folder, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for endpoint in ("chat", "responses"):
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", URL]
        command += ["--endpoint-type", endpoint, "--streaming", "--request-count", str(REQUESTS), "--concurrency", "1"]
        command += ["--tokenizer", "local/bytes", "--isl", "20", "--osl", "8", "--ui", "none"]
        command += ["--artifact-dir", f"{folder}/{endpoint}"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        (report,) = Path(folder, endpoint).rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text("utf-8"))
        assert found["request_count"]["avg"] == REQUESTS, found
        assert not found.get("error_summary"), found["error_summary"]
