"""Other people's inference engines. Each subpackage needs its own extra."""
