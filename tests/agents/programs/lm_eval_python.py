"""lm-eval: scores and texts by its backends local-completions, local-chat-completions and gguf."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.gguf import GGUFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
pairs = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " Oslo"),
    ("Café für", " é你好"),
]
until = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, i, metadata=("task", i, 1)) for i, args in enumerate(arguments)]


common = {"model": MODEL, "tokenizer_backend": "remote", "tokenized_requests": True, "num_concurrent": 1}
model = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", max_length=512, **common)
scores = model.loglikelihood(requests("loglikelihood", pairs))
assert scores[0][0] > scores[1][0], scores
assert model.generate_until(requests("generate_until", [("The capital of France is", until)]))[0]

gguf = GGUFLM(base_url=URL)
other = gguf.loglikelihood(requests("loglikelihood", pairs))
for ours, theirs in zip(scores, other, strict=True):
    assert abs(ours[0] - theirs[0]) < 0.5, (scores, other)
assert gguf.generate_until(requests("generate_until", [("The capital of France is", until)]))

chat = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL, tokenizer_backend=None)
chat_prompt = '[{"role": "user", "content": "Name one colour."}]'
from lm_eval.models.api_models import JsonChatStr  # noqa: E402

assert chat.generate_until(requests("generate_until", [(JsonChatStr(chat_prompt), until)]))[0]
print("did: scores and texts by local-completions and gguf, texts by local-chat-completions")
