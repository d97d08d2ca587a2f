#pragma once

#include "CoreMinimal.h"

class IModuleInterface {
  public:
    virtual ~IModuleInterface() = default;
};
class FDefaultModuleImpl : public IModuleInterface {};
#define IMPLEMENT_MODULE(Class, Name)                                                                                  \
    IModuleInterface *MakeModule##Name() { return new Class; }
class FDefaultGameModuleImpl : public IModuleInterface {};
#define IMPLEMENT_PRIMARY_GAME_MODULE(Class, Name, Title) IMPLEMENT_MODULE(Class, Name)
