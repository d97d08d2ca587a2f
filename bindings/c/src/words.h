/* Written by `make generate` from bindings/generated-manifest.json; do not edit. */
#ifndef FRAMESHARD_WORDS_H
#define FRAMESHARD_WORDS_H

namespace frameshard_core {

/* The protocol's words. Word 0 of a list has the number 1 in frameshard.h, and so on. */
// clang-format off
constexpr const char *kDecision[] = {"granted", "partial"};
constexpr const char *kEngineState[] = {"loading", "ready", "restarting", "off", "hibernated"};
constexpr const char *kImageFormat[] = {"encoded", "rgb", "rgba"};
constexpr const char *kLeaseState[] = {"active", "parked", "hibernated"};
constexpr const char *kLoadingStage[] = {"read", "profile", "fill"};
constexpr const char *kNoticeKind[] = {"wants", "gives_back", "late", "pressure", "other_process", "state", "http",
    "host_pressure"};
constexpr const char *kPhase[] = {"encode", "prefill"};
constexpr const char *kReason[] = {"stop", "length", "tool_calls"};
constexpr const char *kSchedulingMode[] = {"prioritize_graphics", "balance", "prioritize_compute"};
// clang-format on

} // namespace frameshard_core

#endif
