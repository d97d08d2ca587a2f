/* Written by `make generate` from bindings/generated-manifest.json; do not edit. */
#ifndef FRAMESHARD_OPTIONS_H
#define FRAMESHARD_OPTIONS_H

#include "codec.h"
#include "frameshard.h"

namespace frameshard_core {

/* The fields that a struct stands for, without those that have their default. Wrong ones are refused. */
json fields_of(const fs_launch_options &given);
json fields_of(const fs_sampling &given);
json fields_of(const fs_lease &given);

} // namespace frameshard_core

#endif
