"""Starting the ranks of a run: on this host through torch's elastic agent, or on a cluster through Ray."""
