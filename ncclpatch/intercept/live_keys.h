// The keys that cards know today, with the memory that each is good for: where a thread that posts a request finds, without a
// lock, that nothing about it has changed.
//
// An entry may be replaced while it is read, so it has a version, which is odd meanwhile and another one afterwards. Then, and
// where a key has found no place, the answer is that the key is not known, and the reader asks elsewhere, which takes long: so
// the table grows before a key finds no place. Tables that were too small remain, because a reader may be in one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace amem::intercept {

class LiveKeys {
 public:
  constexpr LiveKeys() = default;
  LiveKeys(const LiveKeys&) = delete;
  LiveKeys& operator=(const LiveKeys&) = delete;

  struct Key {
    std::uint32_t key = 0;
    const void* domain = nullptr;
    std::uint64_t begin = 0, end = 0;
  };
  // One thread at a time.
  void Add(const Key& key) {
    while (!now_.load(std::memory_order_relaxed)->Put(key))
      if (!Grow()) return;
    ++keys_;
  }
  void Remove(std::uint32_t key, const void* domain) {
    const Table* const now = now_.load(std::memory_order_relaxed);
    for (const Table* table = now; table != nullptr; table = table->older)
      for (Entry& entry : table->SetOf(key)) {
        if (!entry.Is(key, domain) || entry.end.load(std::memory_order_relaxed) == 0) continue;
        entry.Write({});
        if (table == now) --keys_;
      }
  }

  // Any thread. Whether the key is good for all of that memory.
  [[nodiscard]] bool Cover(std::uint32_t key, const void* domain, std::uint64_t address, std::uint64_t bytes) const {
    for (const Entry& entry : now_.load(std::memory_order_acquire)->SetOf(key)) {
      const std::uint32_t version = entry.version.load(std::memory_order_acquire);
      if (!entry.Is(key, domain)) continue;
      const std::uint64_t begin = entry.begin.load(std::memory_order_acquire), end = entry.end.load(std::memory_order_acquire);
      if (version % 2 == 0 && entry.version.load(std::memory_order_relaxed) == version)
        return begin <= address && address + bytes <= end;
    }
    return false;
  }

 private:
  // The writer's stores release and the reader's loads acquire, so whoever reads a new field sees the odd version, too.
  struct Entry {
    std::atomic<std::uint32_t> version{0}, key{0};
    std::atomic<const void*> domain{nullptr};
    std::atomic<std::uint64_t> begin{0}, end{0};  // no end: it is free

    [[nodiscard]] bool Is(std::uint32_t other, const void* of) const {
      return key.load(std::memory_order_acquire) == other && domain.load(std::memory_order_acquire) == of;
    }
    [[nodiscard]] Key Read() const {  // by whoever writes
      return {key.load(std::memory_order_relaxed), domain.load(std::memory_order_relaxed),
              begin.load(std::memory_order_relaxed), end.load(std::memory_order_relaxed)};
    }
    void Write(const Key& now) {
      const std::uint32_t before = version.load(std::memory_order_relaxed);
      version.store(before + 1, std::memory_order_relaxed);
      key.store(now.key, std::memory_order_release);
      domain.store(now.domain, std::memory_order_release);
      begin.store(now.begin, std::memory_order_release);
      end.store(now.end, std::memory_order_release);
      version.store(before + 2, std::memory_order_release);
    }
  };
  using Set = std::array<Entry, 4>;
  struct Table {
    Set* sets = nullptr;
    unsigned bits = 0;  // of the number of sets
    Table* older = nullptr;

    [[nodiscard]] Set& SetOf(std::uint32_t key) const { return sets[(key * 2654435769U) >> (32 - bits)]; }
    [[nodiscard]] bool Put(const Key& key) const {
      for (Entry& entry : SetOf(key.key))
        if (entry.end.load(std::memory_order_relaxed) == 0) return entry.Write(key), true;
      return false;
    }
    [[nodiscard]] bool PutAllOf(const Table& other) const {
      for (std::size_t i = 0; i < std::size_t{1} << other.bits; ++i)
        for (const Entry& entry : other.sets[i])
          if (entry.end.load(std::memory_order_relaxed) != 0 && !Put(entry.Read())) return false;
      return true;
    }
  };
  // False: there is no memory, or so few keys are known that those of one place have all bits in common, as those of several
  // cards may.
  bool Grow() {
    Table* const now = now_.load(std::memory_order_relaxed);
    if (keys_ < (std::size_t{1} << now->bits) / 8) return false;
    for (unsigned bits = now->bits + 1; bits <= kMostBits; ++bits) {
      Set* const sets = new (std::nothrow) Set[std::size_t{1} << bits]{};
      Table* const grown = sets == nullptr ? nullptr : new (std::nothrow) Table{sets, bits, now};
      if (grown != nullptr && grown->PutAllOf(*now)) return now_.store(grown, std::memory_order_release), true;
      delete grown;
      delete[] sets;
      if (grown == nullptr) return false;
    }
    return false;
  }

  static constexpr unsigned kFirstBits = 11, kMostBits = 17;
  std::array<Set, std::size_t{1} << kFirstBits> first_sets_{};
  Table first_{first_sets_.data(), kFirstBits};
  std::atomic<Table*> now_{&first_};
  std::size_t keys_ = 0;  // in the newest; of whoever writes
};

}  // namespace amem::intercept
