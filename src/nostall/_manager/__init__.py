"""Parts of the manager: policies, directories, contents of a step, removal."""
