/* aarch64, where NEON with FMA and half conversion is the baseline; nothing elsewhere. */
#if defined __aarch64__ || defined _M_ARM64
#define LANEWISE_NEON
#define ISA_NAME "neon"
#define TABLE lanewise_neon
#include "vec_math.h"

#include "kernels/all.h"

#include "table.h"
#endif
