"""``primus-odc bench``: what every arm takes on synthetic long documents, and what its transfers take alone."""
