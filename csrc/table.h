/* The one exported table of a unit, from the list. An ISA with an algorithm of its own for an operation defines
   OVERRIDES as [OP_name] = function, before it includes this file; later initialisers win. */
#define KERNEL(group, name, args, scratch_bytes) \
  static void entry_##name(const void *a, void *scratch) { name((const struct args *)a, scratch); }
#include "kernels.def"
#undef KERNEL

#pragma GCC diagnostic ignored "-Woverride-init"
extern const struct isa_table TABLE;
const struct isa_table TABLE = {
    ISA_NAME,
    {
#define KERNEL(group, name, args, scratch_bytes) [OP_##name] = entry_##name,
#include "kernels.def"
#undef KERNEL
#ifdef OVERRIDES
        OVERRIDES
#endif
    },
};
