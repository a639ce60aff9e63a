// How a call goes about its sequences, and the workspace that this takes.
#pragma once

#include <cstddef>

namespace flash_kda {

struct Plan {
    int segments = 1;        // of each sequence
    int segment_tokens = 0;  // only with more than one
    // Bytes. With segments: boundary states, then as much for transitions. Else the states that change hands between blocks, and flags; 0 if no item
    // will be cut (schedule.cuh).
    std::size_t workspace_bytes = 0;
};

// For N sequences of at most T tokens and H heads. Depends on nothing but its arguments and FLASH_KDA_SPLIT (0: never cut; auto or unset), so that a
// call can be captured and replayed. `whole`: without segments. With offsets of several sequences there are none either: their lengths are known on the
// device alone. Throws std::runtime_error for another value of FLASH_KDA_SPLIT.
Plan plan_call(int sm_count, int T, int H, int N, bool has_offsets, bool whole);

// Where the flags of a workspace without segments begin.
std::size_t handoff_flags_offset(int sm_count);

}  // namespace flash_kda
