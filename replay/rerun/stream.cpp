#include "replay/rerun/stream.h"

#include <algorithm>

namespace amem {

const Event* EventStream::Peek() {
  while (waiting_.empty() && next_ <= to_ && status_.ok()) {
    const std::uint64_t last = std::min(to_, next_ + kAtOnce - 1);
    const auto read = reader_.Read(SequenceNumber{next_}, SequenceNumber{last}, [this](const Event& event) {
      waiting_.push_back(event);
      return true;
    });
    if (!read) status_ = read.status();
    if (read && read->corrupt_records != 0) status_ = {Code::kCorrupt, read->corruption};
    next_ = last + 1;
  }
  return waiting_.empty() ? nullptr : &waiting_.front();
}

}  // namespace amem
