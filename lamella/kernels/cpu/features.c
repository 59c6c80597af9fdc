/* cpuid, and the kernel's leave to use tiles. */
#include "features.h"


#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int lamella_has_avx512_bf16(void) {
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

/* The kernel grants tile registers to a process that asks. */
int lamella_has_amx_bf16(void) {
    unsigned a, b, c, d;
    if (!lamella_has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#else
int lamella_has_avx512_bf16(void) { return 0; }
int lamella_has_amx_bf16(void) { return 0; }
#endif
