// How a call goes about its sequences, and the workspace that this takes.
#pragma once

#include <cstddef>

namespace flash_kda {

struct Plan {
    // Of each sequence, and their tokens (only if there are more than one).
    int segments = 1, segment_tokens = 0;
    // Whole items may be cut where their states are forgotten (forget.cuh).
    bool may_forget = false;
    // Bytes. With segments: see SegmentParts. Else the states that change hands between blocks, and flags; 0 if no item will be cut (schedule.cuh).
    std::size_t workspace_bytes = 0;
};

// For N sequences of at most T tokens and H heads. Depends on nothing but its arguments and FLASH_KDA_SPLIT (0: never cut; auto or unset), so that a
// call can be captured and replayed. `whole`: without segments, and without forgetting. With offsets of several sequences there are no segments
// either: their lengths are known on the device alone. Throws std::runtime_error for another value of FLASH_KDA_SPLIT.
Plan plan_call(int sm_count, int T, int H, int N, bool has_offsets, bool whole);

// Without segments: where in a workspace the flags begin, in bytes.
std::size_t handoff_flags_offset(int sm_count);

// With segments: where in a workspace the arrays of ForwardParams begin, in bytes. Segment states are first.
struct SegmentParts {
    std::size_t segment_transitions, stretch_states, stretch_transitions, exchange, signals, end;
};
SegmentParts segment_parts(int blocks);

}  // namespace flash_kda
