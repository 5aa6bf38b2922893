"""The `dspark-hf` command line: commands that parse, call and print."""
