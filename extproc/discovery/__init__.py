"""Where workers come from: each source is a stream of ``Reset | Add | Remove`` (see ``updates``)."""
