"""hf.inputs."""
