/* Written by `make generate` from bindings/generated-manifest.json; do not edit. */
#ifndef FRAMESHARD_OPTIONS_H
#define FRAMESHARD_OPTIONS_H

#include "codec.h"
#include "frameshard.h"

namespace frameshard_core {

/* The protocol's fields for a struct, without defaults. Throws on a value that is out of range. */
json fields_of(const fs_launch_options &given);
json fields_of(const fs_sampling &given);
json fields_of(const fs_lease &given);

} // namespace frameshard_core

#endif
