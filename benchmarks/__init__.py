"Our models beside those that a user would pick instead: same weights, same inputs, in turn. `python -m benchmarks`."

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler, which counts bytes, would announce each start
