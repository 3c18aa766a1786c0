"""LM Evaluation Harness: a task of two questions, generated over chat completions."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

URL, MODEL = sys.argv[1:]
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}
metric_list: [{metric: exact_match}]
"""
ROWS = [{"question": "2+2=", "answer": "4"}, {"question": "3+3=", "answer": "6"}]

with TemporaryDirectory() as folder:
    Path(folder, "sums.yaml").write_text(TASK, "utf-8")
    Path(folder, "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", "local-chat-completions"]
    command += ["--model_args", f"model={MODEL},base_url={URL}/v1/chat/completions,tokenizer_backend=None"]
    command += ["--tasks", "sums", "--include_path", folder, "--apply_chat_template", "--output_path", "results"]
    subprocess.run(command, cwd=folder, check=True)
    assert list(Path(folder, "results").rglob("*.json"))
