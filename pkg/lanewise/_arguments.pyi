# Only for cimport: Python sees nothing of it but what Cython adds.
__pyx_capi__: dict[str, object]
__test__: dict[str, str]
