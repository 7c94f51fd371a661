// A plugin of qemu-user (plugin API 1) that counts a program's instructions: see count_arm_instructions.py.
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// Debian packages no header of the API.
struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*call)(uint64_t id, struct qemu_plugin_tb *tb));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, enum qemu_plugin_op op, void *value, uint64_t add);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*call)(uint64_t id, void *data), void *data);

int qemu_plugin_version = 1;
static uint64_t n_instructions;

static void translated(uint64_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &n_instructions, qemu_plugin_tb_n_insns(tb));
}

static void ended(uint64_t id, void *data) {
    (void)id;
    (void)data;
    fprintf(stderr, "instructions: %" PRIu64 "\n", n_instructions);
}

int qemu_plugin_install(uint64_t id, const void *info, int n_arguments, char **arguments) {
    (void)info;
    (void)n_arguments;
    (void)arguments;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
