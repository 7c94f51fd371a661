"""guidellm: a benchmark of a few streamed chats and completions, none of which may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
home = Path(os.environ["HOME"])
data = home / "data.jsonl"
data.write_text(
    "".join(json.dumps({"prompt": f"Name a {what}."}) + "\n" for what in ("colour", "fruit", "city"))
)
for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    report = home / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={URL},model={MODEL},max_tokens=12,request_format={route}",
        "--profile": "kind=concurrent,streams=2",
        "--data": f"kind=json_file,path={data}",
        "--output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    for limit in ("kind=max_requests,count=3", "kind=max_errors,count=1", "kind=max_duration,seconds=90"):
        command += ["--constraint", limit]
    done = subprocess.run(
        [*command, *(text for option in options.items() for text in option)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 3 and not totals["errored"], (route, totals)
print("did: benchmarks of streamed chats, completions and responses")
