"""Names the processor features that a build requires, so that its library is not loaded where one is missing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Macros that compilers define for instruction sets, and the sets' names in Linux's /proc/cpuinfo. Only sets that
# llama.cpp's code can contain are listed, not those for the kernel or the memory system.
_X86 = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE4A__": "sse4a",
    "__POPCNT__": "popcnt",
    "__LZCNT__": "abm",
    "__MOVBE__": "movbe",
    "__ADX__": "adx",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__AES__": "aes",
    "__PCLMUL__": "pclmulqdq",
    "__SHA__": "sha_ni",
    "__GFNI__": "gfni",
    "__VAES__": "vaes",
    "__VPCLMULQDQ__": "vpclmulqdq",
    "__AVX__": "avx",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__FMA4__": "fma4",
    "__XOP__": "xop",
    "__AVX2__": "avx2",
    "__AVXVNNI__": "avx_vnni",
    "__AVXIFMA__": "avx_ifma",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512VP2INTERSECT__": "avx512_vp2intersect",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
}
_ARM = {
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_AES": "aes",
    "__ARM_FEATURE_SHA2": "sha2",
    "__ARM_FEATURE_QRDMX": "asimdrdm",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_FP16_FML": "asimdfhm",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
    "__ARM_FEATURE_SME": "sme",
}
_NAMES = {**_X86, **_ARM}


def required_features(macros: Iterable[str], cpuinfo: Path | None = Path("/proc/cpuinfo")) -> list[str]:
    """Return the features that a compiler's ``#define`` lines stand for, by their names in ``cpuinfo``, sorted.

    The result has only features that this machine lists: an old kernel may not name a feature of its processor, and the
    check at load must not fail on the machine of the build. It is empty without such a list (macOS). For a build for
    another machine ``cpuinfo`` is None, and all features are included.
    """
    defined = {line.split()[1] for line in macros if line.startswith("#define ")}
    named = {name for macro, name in _NAMES.items() if macro in defined}
    return sorted(named if cpuinfo is None else named & _listed(cpuinfo))


def _listed(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        key, _, names = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(names.split())
    return set()
