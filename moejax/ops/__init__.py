"""Plain functions on arrays: no parameters, no configs, no mesh."""
