/* Portable C: what every machine can run, and the reference for all others. */
#define ISA_NAME "scalar"
#define TABLE lanewise_scalar
#include "vec_math.h"

#include "kernels/all.h"

#include "table.h"
