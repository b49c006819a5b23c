/* Which instruction set runs, and what the loader asks first. */
#include "rl.h"

#ifndef RL_SOURCES
#define RL_SOURCES ""
#endif

static int current = -1;

static int best_isa(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return RL_NONE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return RL_AVX2;
    return __builtin_cpu_supports("avx512vnni") ? RL_AVX512VNNI : RL_AVX512;
}

int rl_current_isa(void) {
    if (current < 0)
        current = best_isa();
    return current;
}

RL_API int64_t rl_abi_version(void) { return RL_ABI_VERSION; }

/* A digest of the sources this library was built from. */
RL_API const char *rl_sources(void) { return RL_SOURCES; }

RL_API int64_t rl_isa(void) { return rl_current_isa(); }

/* Use ``isa`` (enum rl_isa_id) from now on; -1 and no change when this CPU lacks it. Not while kernels run. */
RL_API int64_t rl_set_isa(int64_t isa) {
    if (isa < RL_AVX2 || isa > best_isa())
        return -1;
    current = (int)isa;
    return 0;
}
