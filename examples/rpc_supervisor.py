"""A supervisor: a child computes on two RPC workers, one of them dies, the child with it, and every prompt is answered.

ggml-rpc ends the process whose worker ends. So the model is in a child process here; its parent keeps what is done,
starts again what has ended, and gives the rest to a new child.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

import llamapipe as lp

PROMPTS = [f"Once upon a time, there was a little {animal}" for animal in "cat dog cow bird fish fox".split()]


def child(workers: Sequence[str]) -> None:
    """Reads prompts as a line of JSON, and writes a line for each completion."""
    prompts = json.loads(sys.stdin.readline())
    params = lp.SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    model = lp.Model(lp.demo_model_path(), rpc=workers)
    with model, lp.Engine(model, n_seq_max=2, n_ctx=256, n_threads=1) as engine:
        for index, out in engine.iter_completed(prompts, params):
            print(json.dumps([prompts[index], out.text]), flush=True)


def start(*arguments: str) -> "subprocess.Popen[str]":
    """A process whose output is read here."""
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def start_worker() -> tuple[str, "subprocess.Popen[str]"]:
    """A worker and its address, once it listens. On another machine, its own supervisor does this (systemd, …)."""
    process = start("-m", "llamapipe", "rpc-worker", "--port", "0", "--threads", "1")
    assert process.stdout is not None
    return process.stdout.readline().split()[-1], process


def main() -> None:
    """Answers the prompts, although a worker is killed after the first answer."""
    workers = [start_worker() for _ in range(2)]
    answers: dict[str, str] = {}
    n_children = 0
    try:
        while left := [prompt for prompt in PROMPTS if prompt not in answers]:
            workers = [w if w[1].poll() is None else start_worker() for w in workers]
            n_children += 1
            if n_children > 5:
                sys.exit("five children have failed: this needs a look, not another try")
            with start(__file__, "child", *(address for address, _ in workers)) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(left) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    prompt, text = json.loads(line)
                    answers[prompt] = text
                    if len(answers) == 1:
                        workers[1][1].kill()  # the accident
                        workers[1][1].wait()
            print(f"child {n_children} ended with status {process.returncode}; {len(answers)} answers so far")
    finally:
        for _, worker in workers:
            worker.kill()
            worker.communicate()
    for prompt in PROMPTS:
        print(f"{prompt}{answers[prompt][:50]!r}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
    else:
        main()
