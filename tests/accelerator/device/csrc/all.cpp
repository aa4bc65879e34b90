// One translation unit: torch's headers, which cost most of the build, are read once.
#include "backend.cpp"
#include "bindings.cpp"
#include "ccl.cpp"
#include "memory.cpp"
#include "ops.cpp"
#include "world.cpp"
