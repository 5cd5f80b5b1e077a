// What journal/layout.h makes of the structs of event.h is the schema that was released, as Cap'n Proto's own compiler lays it
// out.
#include "journal/layout.h"

#include <capnp/dynamic.h>
#include <capnp/message.h>
#include <capnp/schema.h>
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <sstream>

#include "journal/codec.h"
#include "tests/journal/journal.capnp.h"
#include "tests/journal/samples.h"

namespace amem::test {
namespace {

std::string Camel(std::string_view snake) {
  std::string camel;
  for (std::size_t i = 0; i < snake.size(); ++i) {
    const bool word = snake[i] == '_';
    if (word) ++i;
    camel += word ? static_cast<char>(std::toupper(snake[i])) : snake[i];
  }
  return camel;
}

template <class T>
std::string NameOf() {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(typeid(T).name(), nullptr, nullptr, &status),
                                                    std::free);
  return std::string(name.get()).substr(std::string_view(name.get()).rfind(':') + 1);
}

// "step" of `As{"safepoint", OrNull{step}}`.
std::vector<std::string> MemberNames(std::string_view fields) {
  std::vector<std::string> names;
  std::istringstream words{std::string(fields)};
  for (std::string word; words >> word;) {
    if (word.starts_with("As{\"")) continue;  // the other name
    word.erase(std::ranges::find_if(word, [](char c) { return c == ',' || c == '}'; }), word.end());
    names.push_back(word.substr(word.rfind('{') + 1));
  }
  return names;
}

template <class T>
const void* PlaceOf(const T& field) {
  if constexpr (requires { field.field; }) {
    return PlaceOf(field.field);
  } else {
    return &field;
  }
}

// The names of the members in the order in which T declares them, with those of a location or an array in its place.
template <class T>
std::vector<std::string> FlatNames() {
  std::vector<std::string> names;
  if constexpr (Described<T>) {
    const T value{};
    const std::vector<std::string> listed = MemberNames(T::kFields);
    std::vector<std::pair<const void*, std::string>> by_place;
    std::size_t i = 0;
    ForEachField(value, [&](std::string_view, const auto& field) {
      by_place.emplace_back(PlaceOf(field), Camel(listed.at(i++)));
      if constexpr (std::is_same_v<decltype(field), const Location&>) {
        by_place.back().second = "locationType";
        by_place.emplace_back(&field.id, "locationId");
      }
    });
    std::ranges::sort(by_place);
    for (const auto& [place, name] : by_place) names.push_back(name);
  } else {
    for (int i = 0; i < 5; ++i) names.push_back("frame" + std::to_string(i));  // a call site
  }
  return names;
}

template <class T>
constexpr bool kSigned = std::is_signed_v<T>;
template <class Tag, class Rep>
constexpr bool kSigned<Id<Tag, Rep>> = std::is_signed_v<Rep>;

template <class T>
std::string TypeText() {
  if constexpr (kIsVector<T>) {
    return "List(" + TypeText<typename T::value_type>() + ")";
  } else if constexpr (layout::Number<T>) {
    if (std::is_same_v<T, bool>) return "Bool";
    return (kSigned<T> ? "Int" : "UInt") + std::to_string(8 * sizeof(T));
  } else {
    return std::is_base_of_v<std::string, T> ? "Text" : NameOf<T>();
  }
}

// "address @0 :UInt64; rank @1 :Int32 = -1; ", of all members of a struct.
template <class T>
std::string Declaration() {
  std::string text;
  const std::vector<std::string> names = FlatNames<T>();
  const T unset{};
  std::size_t i = 0;
  const auto member = [&]<class M>(const M& value) {
    text += names.at(i) + " @" + std::to_string(i) + " :" + TypeText<M>();
    if constexpr (layout::Number<M>) {
      if (value != M{}) {
        Dumper dumper;
        dumper.Dump(value);
        text += " = " + (std::is_same_v<M, bool> ? "true" : dumper.text);
      }
    }
    text += "; ";
    ++i;
  };
  std::apply([&](const auto&... members) { (member(members), ...); }, layout::FlatMembers(unset));
  return text;
}

// What Cap'n Proto's compiler made of the schema, in the same words.
std::string TypeText(capnp::Type type) {
  static const char* const kNames[] = {"Void",   "Bool",   "Int8",   "Int16",   "Int32",   "Int64", "UInt8",
                                       "UInt16", "UInt32", "UInt64", "Float32", "Float64", "Text"};
  if (type.isList()) return "List(" + TypeText(type.asList().getElementType()) + ")";
  if (type.isStruct()) return type.asStruct().getShortDisplayName().cStr();
  return kNames[type.which()];
}
std::string Declaration(capnp::StructSchema schema) {
  std::string text;
  for (const auto field : schema.getFields()) {
    text += std::string(field.getProto().getName().cStr()) + " @" + std::to_string(field.getIndex()) + " :" +
            TypeText(field.getType());
    const auto unset = field.getProto().getSlot().getDefaultValue();
    std::int64_t number = 0;
    if (unset.isBool()) number = unset.getBool() ? 1 : 0;
    if (unset.isInt32()) number = unset.getInt32();
    if (unset.isUint32()) number = unset.getUint32();
    if (unset.isUint64()) number = static_cast<std::int64_t>(unset.getUint64());
    if (number != 0) text += " = " + (unset.isBool() ? "true" : std::to_string(number));
    text += "; ";
  }
  return text;
}

template <class T>
void ExpectReleased(capnp::StructSchema schema);

template <class Member>
void ExpectInside(capnp::Type type) {
  if constexpr (kIsVector<Member>) {
    if (type.isList()) ExpectInside<typename Member::value_type>(type.asList().getElementType());
  } else if constexpr (!layout::Number<Member> && !std::is_base_of_v<std::string, Member>) {
    if (type.isStruct()) ExpectReleased<Member>(type.asStruct());
  }
}

template <class T>
void ExpectReleased(capnp::StructSchema schema) {
  const std::string name = schema.getShortDisplayName().cStr();
  ASSERT_EQ(Declaration<T>(), Declaration(schema)) << "of struct " << name << ", as it is in event.h and as it was released";
  const auto compiled = schema.getProto().getStruct();
  EXPECT_EQ(layout::kLayout<T>.words, compiled.getDataWordCount()) << name;
  EXPECT_EQ(layout::kLayout<T>.pointers, compiled.getPointerCount()) << name;
  const auto fields = schema.getFields();
  for (unsigned i = 0; i < fields.size(); ++i)
    EXPECT_EQ(layout::kLayout<T>.at[i], fields[i].getProto().getSlot().getOffset()) << name << ", member " << i;
  [&]<class... Member>(std::type_identity<std::tuple<Member&...>>) {
    unsigned i = 0;
    (ExpectInside<Member>(fields[i++].getType()), ...);
  }(std::type_identity<decltype(layout::FlatMembers(std::declval<T&>()))>());
}

template <class T>
void ExpectKind(std::size_t kind) {
  const auto all = capnp::Schema::from<wire::Event>().getUnionFields();
  std::string name = NameOf<T>();
  const std::string type = name;
  name[0] = static_cast<char>(std::tolower(name[0]));
  ASSERT_LT(kind, all.size()) << "add `" << name << " @" << kind + 3 << " :" << type
                              << ";` to the union in journal.capnp, and `struct " << type << " { " << Declaration<T>() << "}`";
  EXPECT_EQ(all[static_cast<unsigned>(kind)].getProto().getDiscriminantValue(), kind);
  EXPECT_STREQ(all[static_cast<unsigned>(kind)].getProto().getName().cStr(), name.c_str());
  ExpectReleased<T>(all[static_cast<unsigned>(kind)].getType().asStruct());
}

TEST(Layout, every_kind_of_event_is_what_was_released) {
  [&]<class... Kinds>(const std::variant<Kinds...>*) {
    std::size_t kind = 0;
    (ExpectKind<Kinds>(kind++), ...);
    EXPECT_EQ(kind, capnp::Schema::from<wire::Event>().getUnionFields().size()) << "kinds in journal.capnp";
  }(static_cast<const EventVariant*>(nullptr));
}

TEST(Layout, the_journals_own_record_is_what_was_released) { ExpectReleased<FileMeta>(capnp::Schema::from<wire::Journal>()); }

// What another program reads in the messages, with the schema that was released and nothing of AMem's.
TEST(Layout, capnp_reads_what_the_codec_writes) {
  Encoder encoder;
  const Event event{SequenceNumber{0x8000000000000001}, 5, 77,
                    ProcessSeen{SessionId{0xabcdef}, -4, "stopped", "in futex", "", 137, 99}};
  const auto message = encoder.Encode(event);
  const kj::ArrayPtr<const capnp::word> segment(reinterpret_cast<const capnp::word*>(message.data()), message.size() / 8);
  const kj::ArrayPtr<const capnp::word> segments[] = {segment};
  capnp::SegmentArrayMessageReader reader(kj::arrayPtr(segments, 1));
  const auto root = reader.getRoot<wire::Event>();
  EXPECT_EQ(root.getSeq(), 0x8000000000000001);
  EXPECT_EQ(root.getTimeNs(), 5U);
  EXPECT_EQ(root.getThread(), 77U);
  ASSERT_TRUE(root.isProcessSeen());
  const auto seen = root.getProcessSeen();
  EXPECT_EQ(seen.getSession(), 0xabcdefU);
  EXPECT_EQ(seen.getPid(), -4);
  EXPECT_STREQ(seen.getState().cStr(), "stopped");
  EXPECT_STREQ(seen.getWhere().cStr(), "in futex");
  EXPECT_FALSE(seen.hasAnswer());
  EXPECT_EQ(seen.getExitCode(), 137);
  EXPECT_EQ(seen.getWaitedNs(), 99U);
}

}  // namespace
}  // namespace amem::test
