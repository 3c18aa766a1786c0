"""GuideLLM with its default options: requests of a file, one after the other."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

URL, MODEL = sys.argv[1:]
PROMPTS = ["Name a city.", "Name a river.", "Name a sea."]

with TemporaryDirectory() as folder:
    data = Path(folder, "prompts.jsonl")
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), "utf-8")
    options = {
        "--backend": f"kind=openai_http,target={URL},model={MODEL}",
        "--profile": "kind=synchronous",
        "--constraint": f"kind=max_requests,count={len(PROMPTS)}",
        "--data": f"kind=json_file,path={data}",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run"]
    subprocess.run([*command, *(word for option in options.items() for word in option)], cwd=folder, check=True)
    (benchmark,) = json.loads(Path(folder, "benchmarks.json").read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (len(PROMPTS), 0), totals
