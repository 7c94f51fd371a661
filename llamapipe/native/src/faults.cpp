// The handlers of SIGSEGV and SIGFPE while a model is loaded or a context is created. They leave the faulting code by a
// long jump, so destructors do not run.
#include "faults.hpp"

#include "signal_watch.hpp"

#include <csetjmp>

namespace {

struct Exit {
    sigjmp_buf buffer;
    Exit *     outer;
};

void on_fault(int number, siginfo_t * info, void * context);

lp::SignalWatch     g_null_pointers(SIGSEGV, on_fault), g_divisions(SIGFPE, on_fault);
thread_local Exit * t_exit = nullptr;
// The system maps nothing below this address. Faults elsewhere mean that memory was overwritten: those end the process.
constexpr uintptr_t null_page_end = 65536;

void on_fault(int number, siginfo_t * info, void * context) {
    const bool is_null     = number == SIGSEGV && (uintptr_t) info->si_addr < null_page_end && info->si_code == SEGV_MAPERR;
    const bool is_division = number == SIGFPE && info->si_code == FPE_INTDIV;
    if (t_exit != nullptr && (is_null || is_division)) {
        siglongjmp(t_exit->buffer, number);
    }
    (number == SIGSEGV ? g_null_pointers : g_divisions).forward(info, context);
}

}  // namespace

namespace lp {

const char * run_until_fault(void (*work)(void * data), void * data) noexcept {
    const bool watches_pointers = g_null_pointers.begin(), watches_divisions = g_divisions.begin();
    Exit       here;
    here.outer       = t_exit;
    const int number = sigsetjmp(here.buffer, 0);  // the handlers block no signal
    if (number == 0) {
        t_exit = &here;
        work(data);
    }
    t_exit = here.outer;
    if (watches_divisions) {
        g_divisions.end();
    }
    if (watches_pointers) {
        g_null_pointers.end();
    }
    return number == 0 ? nullptr : number == SIGFPE ? "divided by zero" : "read from a null pointer";
}

}  // namespace lp
