from __future__ import annotations

import pytest

# They are no test modules: without this their assertions would say nothing.
pytest.register_assert_rewrite("tests.bench.lab.labs", "tests.bench.lab.live_lab")
