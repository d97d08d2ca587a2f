// Empty, because the stubs need nothing of what Unreal's header tool writes here.
