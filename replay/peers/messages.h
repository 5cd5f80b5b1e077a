// Messages between AMem processes, as plain values. Their form on the wire follows from the structs as they are declared
// (journal/struct_codec.h): one message a packet, of SOCK_SEQPACKET sockets. A connection begins with a hello and a welcome.
// New kinds go to the end of MessageBody, new members to the end of their struct, with a default that means the old behaviour;
// both raise the protocol's version. Hello, welcome and failure never change: builds of different versions use them to refuse
// each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/requests.h"
#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

inline constexpr std::uint32_t kPeerProtocol = 11;       // the newest and the oldest that this build speaks
inline constexpr std::uint32_t kPeerProtocolLeast = 11;  // 2 knew no tags, 3 no requests, 4 no steps of a freeze, 5 another
                                                         // form, 6 not whose loss a vote is about, 7 not who is absent,
                                                         // 8 no pages beside a hello, 9 voted by messages, 10 not that a
                                                         // program pauses just now
inline constexpr std::size_t kMessageBytesMax = 128 * 1024;
inline constexpr std::size_t kDescriptorsMax = 250;  // beside one message; the kernel's limit is 253
inline constexpr std::size_t kMembersMax = 512;      // sessions in one message
inline constexpr std::size_t kReferencesMax = 4096;  // in one message

enum class Purpose : std::uint8_t {
  kData = 0,   // import, reimport, dropped; when it closes, it is checked whether the peer has ended
  kRound = 1,  // pages, boards, and who waits for whom
  // Of a tool: orders and questions for the status. While one that has given an order is open, no other may give any.
  kRequest = 2,
};
constexpr Enumerators<Purpose> EnumeratorsOf(Purpose) { return {Purpose::kRequest, "purpose"}; }

// Beside a hello, but for a tool's, and beside the welcome that answers it goes a descriptor of the sender's page (board/).
struct HelloMessage {
  std::uint32_t version = 0;  // the newest that the sender speaks
  std::uint32_t least_version = 0;
  Purpose purpose = Purpose::kData;
  PeerIdentity self;
  SessionId to;
};
struct WelcomeMessage {
  std::uint32_t version = 0;  // spoken from here on
  PeerIdentity self;
};
struct FailureMessage {
  Status status;
};
struct ImportMessage {
  AllocationId as;
  Token token;
};
struct ReimportMessage {
  std::vector<ShareRequest> references;
};
struct SharedMessage {  // one descriptor beside it for each item that is not a part of a slab
  std::vector<SharedItem> items;
};
struct DroppedMessage {
  std::vector<ShareRequest> references;
};
// The sender waits until the receiver comes to a call about NCCL's memory. Answered by a failure, which says what prevents it;
// ok: nothing that it knows of.
struct AwaitingMessage {};
struct OrderMessage {  // answered by a RankStatusMessage, as AskStatusMessage is
  control::Order order;
};
struct AskStatusMessage {};
struct RankStatusMessage {
  control::RankStatus status;
};
struct AskBoardMessage {  // of the session with the lowest id of that set; answered by a board
  std::string scope;
  std::vector<SessionId> members;  // sorted
  std::uint64_t instead_of = 0;    // the id of a board that is damaged; 0: of none
};
struct BoardMessage {};  // with the board's descriptor
struct NoteMessage {     // for the rank's journal: Frozen or FreezeStep. Answered by a RankStatusMessage when it is there
  EventBody event;
};

using MessageVariant = std::variant<HelloMessage, WelcomeMessage, FailureMessage, ImportMessage, ReimportMessage, SharedMessage,
                                    DroppedMessage, AwaitingMessage, OrderMessage, AskStatusMessage, RankStatusMessage,
                                    NoteMessage, AskBoardMessage, BoardMessage>;
// A variant whose copies and moves are compiled in messages.cpp, and not wherever a message is handed on.
struct MessageBody : MessageVariant {
  using MessageVariant::MessageVariant;
  MessageBody();
  MessageBody(const MessageBody& other);
  MessageBody(MessageBody&& other) noexcept;
  MessageBody& operator=(const MessageBody& other);
  MessageBody& operator=(MessageBody&& other) noexcept;
  ~MessageBody();
};

struct Message {
  std::uint64_t request = 0;
  MessageBody body;
};

// Texts and lists that are too long are cut to what a message may hold. The result is padded to whole words.
Result<std::vector<std::byte>> EncodeMessage(const Message& message);
// Safe on any bytes: kCorrupt for what is not a message, or out of its bounds.
Result<Message> DecodeMessage(std::span<const std::byte> bytes);

}  // namespace amem
