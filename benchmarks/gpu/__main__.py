"""`python -m benchmarks.gpu`: see `benchmarks.gpu.program`, which is imported if this Python has what it imports."""

import sys

from benchmarks.gpu.needed import TO_RUN, what_is_missing

if __name__ == "__main__":
    if told := what_is_missing(TO_RUN):
        sys.exit(told)
    from benchmarks.gpu.program import main

    sys.exit(main())
