"""vLLM on CPUs: all prompts as one batch, whole completions. It computes with the file's weights as bfloat16.

It cannot read GGUF files on CPUs, so the weights and the tokenizer are written as a Hugging Face folder into the
system's temporary folder, once for each file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter

os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # answers go to standard output
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from worker import Measured, Run, serve
from workload import SCHEMA, Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """One engine in this process; it caches prefixes where prompts share one."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{work.n_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    llm = LLM(
        str(_folder(path)),
        dtype="bfloat16",
        max_model_len=work.n_ctx,
        max_num_seqs=work.n,
        enable_prefix_caching=bool(work.n_shared),
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=work.n_generate,
        ignore_eos=not work.schema,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if work.schema else None,
    )

    def run(prompts: list[list[int]]) -> Measured:
        began = perf_counter()
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return Measured(perf_counter() - began, sum(len(out.outputs[0].token_ids) for out in outs), [])

    return run


def _folder(path: Path) -> Path:
    folder = Path(tempfile.gettempdir()) / f"llamapipe-peers-{path.stem}"
    if not (folder / "tokenizer.json").is_file():  # written last
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        ).save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


serve(start)
