"""Gives GBNF texts to llama.cpp's own parser: for a process of its own, which some of them would end.

The arguments are a folder of texts and how many tokens to follow in each; prints a line for each text.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llamapipe as lp
from llamapipe.llama import Vocab
from llamapipe.native.load import native
from support.sampler_definitions import Theirs, TokenData, TokenDataArray


def allowed(library: ctypes.CDLL, sampler: int, vocab: Vocab) -> list[int]:
    """The tokens the grammar leaves, without ends of generation."""
    rows = (TokenData * vocab.n_vocab)(*[TokenData(t, 0.0, 0.0) for t in range(vocab.n_vocab)])
    candidates = TokenDataArray(rows, vocab.n_vocab, -1, False)
    library.llama_sampler_apply(sampler, ctypes.byref(candidates))
    return [row.id for row in rows if row.logit == 0.0 and row.id not in vocab.eog_tokens]


def main(folder: str, n_tokens: int) -> None:
    """Reads every text of the folder, in order of their names."""
    with lp.Model.demo() as model:
        address = int(native().ffi.cast("uintptr_t", model.vocab.handle))
        library = Theirs().lib
        library.llama_sampler_init_grammar.restype = ctypes.c_void_p
        library.llama_sampler_init_grammar.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        for text in sorted(Path(folder).iterdir()):
            sampler = library.llama_sampler_init_grammar(address, text.read_bytes(), b"root")
            if not sampler:
                sys.stdout.write(f"{text.name} refused\n")
                continue
            for _ in range(n_tokens):
                tokens = allowed(library, sampler, model.vocab)
                if not tokens:
                    break
                library.llama_sampler_accept(sampler, tokens[0])
            library.llama_sampler_free(sampler)
            sys.stdout.write(f"{text.name} read\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
