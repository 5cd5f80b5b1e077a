// Tokens: what stands for an exported allocation between two processes, as 64 bytes and as a descriptor.
//
//   offset  0  "AMEMTOK1"
//           8  owner's session
//          16  allocation, the owner's id
//          24  secret, 16 bytes
//          40  offset of the exported address in its allocation
//          48  process that made it, 4 bytes
//          52  unused bytes at the end of the allocation, from rounding up, 4 bytes
//          56  checksum of the 56 bytes before it
//
// Numbers are little-endian. The checksum finds accidents; what finds forgeries is the secret, which the owner checks.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "journal/base/unique_fd.h"
#include "replay/peers/peers.h"
#include "statemachine/types.h"

namespace amem {

inline constexpr std::size_t kTokenBytes = 64;

// The name of a token's memfd. It is what one sees in /proc/PID/fd, and the driver of a peer without AMem
// fails on such a descriptor, so the name says why.
inline constexpr const char* kTokenDescriptorName = "amem-token:peer-needs-AMem";

std::array<std::byte, kTokenBytes> Encode(const Token& token);

// kNotFound: not a token at all (a driver's own IPC handle). kCorrupt: begins as a token, and is damaged or of another version.
Result<Token> Decode(std::span<const std::byte> bytes);

// A sealed memfd with the token, close-on-exec.
Result<UniqueFd> MakeTokenDescriptor(const Token& token);

// Another descriptor of a token's memfd. AnyOpen(token) is true for as long as it, or a copy of it in any process, is open; the
// kernel keeps that count, as the driver's for its own descriptors.
Result<UniqueFd> OpenCounted(int token);
bool AnyOpen(int token);

// Reads a token without moving the descriptor's offset; `fd` stays the caller's. kNotFound: a descriptor of the driver or the
// simulator; pass it through. kInvalid: something else; the message says what. kCorrupt: a damaged token.
Result<Token> ReadTokenDescriptor(int fd);

Result<Secret> RandomSecret();
// In a time that does not depend on where the two differ.
bool SameSecret(const Secret& a, const Secret& b);

}  // namespace amem
