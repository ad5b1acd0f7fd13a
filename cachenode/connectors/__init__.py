"""What runs inside an engine's process, and alone may know torch and vllm."""
