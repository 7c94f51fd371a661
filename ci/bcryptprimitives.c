// A library of Windows that Wine 8 lacks (Wine 9 has it), with the one function that programs in Rust call: for tests.
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(void * bytes, ULONG n);  // RtlGenRandom, of advapi32

__declspec(dllexport) BOOL WINAPI ProcessPrng(BYTE * bytes, SIZE_T n) {
    for (; n > 0x1000; n -= 0x1000, bytes += 0x1000) {
        SystemFunction036(bytes, 0x1000);
    }
    return SystemFunction036(bytes, (ULONG) n);
}
