"""The networks. Parameter names are those of the original checkpoint layout (SPEC 1.3-1.6)."""
