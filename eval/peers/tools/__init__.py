"""One small script a tool. They run in the tool's own environment, so they import nothing of quantkit but `task`."""
