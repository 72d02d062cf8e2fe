from tests.rows import is_installed

collect_ignore = ["test_gpu.py", "test_loading.py"]
if is_installed("nvidia.dali") and is_installed("torchcodec"):
    collect_ignore = []
