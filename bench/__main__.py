from . import bars
for bar in bars.measured(1.0): print(bar, flush=True)
