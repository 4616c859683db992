"""A local tier: the process that copies, what is in a local root, and the saves that go there."""
