"""Every operation beside its floor and its peers: `python -m bench` in the repository (docs/performance.md)."""

import os

# read when the libraries are first imported: nobody gets a second core, unless the bench says so
os.environ |= dict.fromkeys(("LANEWISE_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
