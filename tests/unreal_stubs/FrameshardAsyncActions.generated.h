// Unreal's header tool makes this one; there is nothing in it that the stubs need.
