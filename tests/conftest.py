"""One thread for every test process: the models are tiny, and tests run side by side on the cores (`make test`)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
