"""As bench/gpu/recovery.py, at the larger size."""

from functools import partial

from bench.gpu.recovery import LARGE, main
from bench.gpu.say import begin

if __name__ == "__main__":
    begin(partial(main, sizes=LARGE))
