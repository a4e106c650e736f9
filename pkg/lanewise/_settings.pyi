__pyx_capi__: dict[str, object]  # added by Cython, and so is __test__
__test__: dict[str, str]
PRESETS: dict[str, tuple[str, ...]]
PARAMETERS: tuple[str, ...]
