// Whether a call cuts its sequences into segments, and into how many.
#pragma once

#include <cstddef>

namespace flash_kda {

struct Plan {
    int segments = 1;        // of each sequence
    int segment_tokens = 0;  // only with more than one
};

// For N sequences of at most T tokens and H heads. Depends on nothing but its arguments and FLASH_KDA_SPLIT (0: never cut; auto or unset), so that a
// call can be captured and replayed. With offsets of several sequences nothing is cut: their lengths are known on the device alone.
// Throws std::runtime_error for another value of FLASH_KDA_SPLIT.
Plan plan_segments(int sm_count, int T, int H, int N, bool has_offsets);

// What a plan needs, in bytes: boundary states and transitions.
std::size_t segment_bytes(const Plan& plan, int H, int N);

// What a call that cuts no sequence into segments needs to share out its items evenly among `blocks` blocks: room for the states that change hands, and
// flags. 0 if no item will be cut (schedule.cuh).
std::size_t handoff_bytes(int blocks, int T, int H, int N, bool has_offsets);
// Of these, where the flags begin.
std::size_t handoff_flags_offset(int blocks);

}  // namespace flash_kda
